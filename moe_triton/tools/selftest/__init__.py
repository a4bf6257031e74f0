"""``moe-triton selftest``: does this machine do what the library promises, and how fast is it?

A battery of checks, each in processes of its own and each with a deadline, and a report of them to attach
to an issue (docs/selftest.md). It is the same for all back ends.
"""
