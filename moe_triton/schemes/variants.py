"""What a plan is specialised for: see `moe_triton.operators.variants`."""

from moe_triton.operators.variants import BLOCK_QUANTIZE_MODE as BLOCK_QUANTIZE_MODE
from moe_triton.operators.variants import CombineVariant as CombineVariant
from moe_triton.operators.variants import DispatchVariant as DispatchVariant
from moe_triton.operators.variants import Mask as Mask
from moe_triton.operators.variants import Variant as Variant
