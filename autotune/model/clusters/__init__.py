"""Groups of ranks: routing, the slowest rank, schemes; A2's schemes and Ascend's own operators."""
