"""When the launches of a plan begin and end, on one rank and on several that wait for each other."""
