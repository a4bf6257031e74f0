"""Settings of a whole dispatch and combine: which scheme, and what a rank is set to."""
