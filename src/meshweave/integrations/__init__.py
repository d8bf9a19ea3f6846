"""Trainers of other projects on compiled steps. A module here imports the package that it is for; nothing else imports
it."""
