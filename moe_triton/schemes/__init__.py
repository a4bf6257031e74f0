"""Communication schemes: each builds the plans of dispatch and combine."""
