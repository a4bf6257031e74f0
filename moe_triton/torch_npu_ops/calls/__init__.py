"""From the arguments of a call to its plan and back: plans by shape, tensors made ready, outputs.

Functions here take every argument of the newest version; a public function passes what its own version
lacks as the default.
"""
