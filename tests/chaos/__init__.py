"""Faults at random moments: what a group of ranks meets in the field, and whether it goes on afterwards.

``python -m tests.chaos`` runs trials until its time is up. See `tests.chaos.trial` for what a trial is.
"""
