"""Which rules apply to what, and the checks themselves."""

from __future__ import annotations

from collections.abc import Sequence

from moe_triton.core.config import Config
from moe_triton.core.errors import ArgumentError
from moe_triton.limits import a2, a3, a3_v1
from moe_triton.limits.call import Call
from moe_triton.limits.common import COMMON, GENERATIONS
from moe_triton.limits.rule import CallRule, ConfigRule, RuleSet, use_one
from moe_triton.schemes import SCHEMES, scheme_type

# Every set, in the order of the documentation.
RULE_SETS: tuple[RuleSet, ...] = (
    COMMON,
    a3.V2,
    a3.FULLMESH_V2,
    a3_v1.V1,
    a2.A2,
    a2.V2_FULLMESH,
    a2.V2_HIERARCHY,
    a2.V1_FULLMESH,
    a2.V1_HIERARCHY,
)

# What holds besides `COMMON`, by product and version, and besides that by scheme.
_OF_VERSION: dict[tuple[str, int], RuleSet] = {
    ("A3", 1): a3_v1.V1,
    ("A3", 2): a3.V2,
    ("A2", 1): a2.A2,
    ("A2", 2): a2.A2,
}
_OF_SCHEME: dict[tuple[str, int, str], RuleSet] = {
    ("A3", 2, "fullmesh_v2"): a3.FULLMESH_V2,
    ("A2", 1, "fullmesh"): a2.V1_FULLMESH,
    ("A2", 1, "hierarchy"): a2.V1_HIERARCHY,
    ("A2", 2, "fullmesh"): a2.V2_FULLMESH,
    ("A2", 2, "hierarchy"): a2.V2_HIERARCHY,
}

# What torch_npu calls the fields of a `Config` that it has an argument for.
TORCH_NPU_NAMES: dict[str, str] = {
    "num_ranks": "ep_world_size",
    "num_max_tokens_per_rank": "expert_ids.shape[0]",
    "hidden": "x.shape[1]",
    "num_topk": "expert_ids.shape[1]",
    "num_experts": "moe_expert_num",
    "num_shared_experts": "shared_expert_num",
    "num_shared_ranks": "shared_expert_rank_num",
    "num_special_experts": "zero_expert_num + copy_expert_num + const_expert_num",
}


def torch_npu_names(call: Call) -> dict[str, str]:
    """What the caller of this call knows the fields of a `Config` as, for `ArgumentError.renamed`."""
    names = dict(TORCH_NPU_NAMES)
    if call.is_combine:
        names["hidden"] = "expand_x.shape[1]"
    if call.global_bs:
        names["num_max_tokens_per_rank"] = "global_bs / ep_world_size"
    return names


def rule_sets_for(product: str, version: int, scheme: str) -> tuple[RuleSet, ...]:
    """The sets that apply, in the order in which they are checked."""
    found = _OF_VERSION.get((product, version)), _OF_SCHEME.get((product, version, scheme))
    return (COMMON, *(rule_set for rule_set in found if rule_set))


def rules_for(config: Config) -> tuple[ConfigRule, ...]:
    """The rules on this `Config`, whether or not its product can be served."""
    sets = rule_sets_for(config.product, config.version, config.scheme)
    rules = (rule for rule_set in sets for rule in rule_set.config)
    return tuple(rule for rule in rules if _is_of(rule, config))


def call_rules_for(config: Config, call: Call) -> tuple[CallRule, ...]:
    """The rules on this call."""
    sets = rule_sets_for(config.product, call.version, config.scheme)
    rules = (rule for rule_set in sets for rule in rule_set.call)
    return tuple(rule for rule in rules if _is_of(rule, config))


def _is_of(rule: ConfigRule | CallRule, config: Config) -> bool:
    """Whether a rule belongs to the generation that a `Config` names."""
    # Of a generation that there is not, every rule holds: the one that refuses it among them.
    return config.generation not in GENERATIONS or config.generation in rule.generations


def check_rules(config: Config) -> None:
    """Checks every rule on a `Config`, whether or not its product can be served.

    Raises:
        ArgumentError: the first rule that does not hold.
    """
    config = config.normalized()
    for rule in rules_for(config):
        rule.check(config)


def check_config(config: Config) -> None:
    """Checks every rule on a `Config`, and then that its product and scheme can be served.

    Raises:
        ArgumentError: the first rule that does not hold, under the name of the field of `Config`.
    """
    check_rules(config)
    schemes = list(SCHEMES.get(config.product, ()))
    if not schemes:
        raise ArgumentError(
            "product",
            repr(config.product),
            f"only {sorted(SCHEMES)} can be served yet",
            f"Use product={min(SCHEMES)!r}.",
        )
    if config.scheme not in schemes:
        raise ArgumentError(
            "comm_alg",
            repr(config.scheme),
            f"{config.product} has {schemes} here yet",
            f"Use comm_alg={schemes[0]!r}.",
        )
    scheme_type(config).check_reaches(config)


def check_argument(argument: str, config: Config, call: Call) -> None:
    """Checks the rules on one argument of a call of which nothing else is known yet.

    Args:
        argument: its name in torch_npu.
        config: the group's settings, which may break rules.
        call: what is asked for, as far as this argument goes.

    Raises:
        ArgumentError: the first rule that does not hold.
    """
    for rule in call_rules_for(config.normalized(), call):
        if rule.argument == argument:
            rule.check(config, call)


def offering(error: ArgumentError, names: Sequence[str]) -> ArgumentError:
    """An error, which names what the caller may choose from where it is about the name of a scheme.

    Args:
        error: any.
        names: that the caller takes as ``comm_alg``. Rules name the schemes that there are.
    """
    if error.argument != "comm_alg":
        return error
    return ArgumentError(error.argument, error.value, error.rule, use_one(names), code=error.code)


def check_call(config: Config, call: Call) -> None:
    """Checks the rules on the arguments of a call that `Config` does not hold.

    Args:
        config: one that keeps every rule.
        call: what is asked for.

    Raises:
        ArgumentError: the first rule that does not hold, under torch_npu's name of the argument.
    """
    config = config.normalized()
    for rule in call_rules_for(config, call):
        rule.check(config, call)
