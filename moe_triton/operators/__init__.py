"""Dispatch and combine as data: what they take, what they return, and what an argument makes of them.

Arguments have torch_npu's names here, and the names of the placeholders that they fill in a plan, which are
those of
`EPBuffer`. Which function takes an argument, and whether it may be left out, is in that function's signature.
"""
