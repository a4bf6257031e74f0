"""torch_npu's functions: names, orders and defaults are the interface (docs/operators.md, "Outputs").

Shapes: BS tokens of this rank, H hidden, K experts per token, M routed experts, S shared experts, R ranks of
shared experts, EP ranks, localE experts on this rank, A rows that a dispatch can deliver here, G = global_bs
or BS * EP. Errors: every function raises `ArgumentError` with a status code (161001 a required tensor is
missing, 161002 a type, dtype or group is wrong, 561002 a shape or an attribute is) before anything is sent,
`BufferStateError` where an earlier failure put the ranks out of step, and `CommunicationTimeoutError` where a
rank's data did not come in time.
"""
