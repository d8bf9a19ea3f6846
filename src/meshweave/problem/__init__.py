"""A program as the scheduler sees it: items with seconds, what needs what, what lives where."""
