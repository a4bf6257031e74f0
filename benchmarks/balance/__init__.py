"""A day of routing that drifts, simulated: what policies of placement make of it, and what they cost.

``python -m benchmarks.balance`` simulates EP 16 to 256, prices steps by the model of an A3, and runs two and
four ranks as processes; ``... page`` writes docs/benchmarks-balance.md from what that left.

Symbols: E experts of the model, R slots on ranks, W ranks, T tokens of a rank in a step, K experts of a
token. A step is one dispatch, experts and combine of one layer.

- `routing`: which experts tokens go to, step by step.
- `loads`: rows of each rank under a placement, with the very ids, and the least that there can be.
- `policies`: who has which placement when.
- `costs`: microseconds of a step and of moves on an A3.
- `simulation`: all of these over a day.
- `processes`: the same on this machine, with `EPBuffer`.
"""
