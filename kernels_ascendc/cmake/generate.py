"""``generate.py PACKAGE FOLDER [--with=FILE...]``: the generated headers.

They are of the tables of moe_triton in the folder PACKAGE, and of further schemes' ascendc.py. The package's
own __init__.py needs torch, which a build in isolation has not: it is left out.
"""

import runpy
import sys
import types

package, folder, *others = sys.argv[1:]
moe_triton = types.ModuleType("moe_triton")
moe_triton.__path__ = [package]
sys.modules["moe_triton"] = moe_triton
sys.argv[1:] = ["--output", folder, *others]
runpy.run_module("moe_triton.tools.codegen", run_name="__main__")
