"""The model against published times, and its constants from measured ones."""
