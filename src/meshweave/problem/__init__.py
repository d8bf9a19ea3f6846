"""A program in the scheduler's form: items with durations, dependencies and storages."""
