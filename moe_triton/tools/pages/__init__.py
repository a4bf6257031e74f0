"""Pages of the documentation that are made of tables."""
