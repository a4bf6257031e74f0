"""Plans: what a call's arguments say about it, checked once per shape and executed as often as it comes."""
