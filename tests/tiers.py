"""The quick tier, for every save: unit tests, and two files that run ranks as processes.

    python -m tests.tiers      # the files, for pytest's command line

`make test` runs all files, these too; what is marked `long` only `make test-long` runs. A file is quick if it
takes a core for 15 s at most and does not build the kernels.
"""

# Those that take longest first, so that two workers end together.
QUICK = (
    "tests/test_readme.py",
    "tests/torch_npu_ops/test_worked_example.py",
    "tests/test_rounds.py",
    "tests/test_layout.py",
    "tests/kernels/test_weighted_sum.py",
    "tests/kernels/test_route.py",
    "tests/kernels/test_arrange.py",
    "tests/test_limits_sizes.py",
    "tests/test_diagnosis.py",
    "tests/test_limits_calls.py",
    "tests/test_reference_combine.py",
    "tests/test_attempts.py",
    "tests/test_call_word.py",
    "tests/test_abi.py",
    "tests/test_reference.py",
    "tests/test_membership.py",
    "tests/test_notes.py",
    "tests/test_docs_code.py",
    "tests/test_reference_dispatch.py",
    "tests/test_tuning.py",
    "tests/test_part_tokens.py",
    "tests/test_tables.py",
    "tests/test_plan.py",
    "tests/backends/test_room.py",
    "tests/backends/test_output_pool.py",
    "tests/backends/test_triton_rewrites.py",
    "tests/autotune/gate/test_cache.py",
    "tests/autotune/gate/test_costs.py",
    "tests/autotune/gate/test_stream.py",
    "tests/autotune/model/test_constants.py",
    "tests/autotune/model/test_replay_pipes.py",
    "tests/autotune/model/test_replay_programs.py",
    "tests/autotune/model/test_floor.py",
    "tests/autotune/model/test_sensitivity.py",
    "tests/autotune/model/test_timeline.py",
    "tests/selftest/test_report.py",
    "tests/selftest/test_timing.py",
    "tests/test_awaited.py",
    "tests/test_exclusive.py",
    "tests/test_limits.py",
    "tests/test_limits_buffer_size.py",
    "tests/test_limits_choice.py",
    "tests/test_soc.py",
    "tests/test_tiers.py",
    "tests/torch_npu_ops/test_descriptions.py",
)

if __name__ == "__main__":
    print(*QUICK)
