"""``generate.py PACKAGE FOLDER``: the generated headers, from the tables of moe_triton in the folder PACKAGE.

The package's own __init__.py needs torch, which a build in isolation has not: it is left out.
"""

import runpy
import sys
import types

package, folder = sys.argv[1:]
moe_triton = types.ModuleType("moe_triton")
moe_triton.__path__ = [package]
sys.modules["moe_triton"] = moe_triton
sys.argv[1:] = ["--output", folder]
runpy.run_module("moe_triton.tools.codegen", run_name="__main__")
