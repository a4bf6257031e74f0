"""What the model knows of relayed tokens, against the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from autotune.model.traffic import relay_tables
from moe_triton.core.config import Config
from moe_triton.reference import hierarchy
from moe_triton.schemes.hierarchy.relay_tables import RelayTables


@pytest.mark.parametrize("per_server", [2, 4])
def test_tables_are_the_references(per_server: int) -> None:
    ranks, tokens, topk = 8, 5, 3
    config = Config(
        ranks,
        tokens,
        64,
        topk,
        16,
        product="A2",
        scheme="hierarchy",
        ranks_per_server=per_server,
        relaxed=True,
    )
    draw = np.random.default_rng(7)
    ids = np.stack([[draw.permutation(16)[:topk] for _ in range(tokens)] for _ in range(ranks)])
    ids = ids.astype(np.int32)
    ids[1] = -1
    ids[2, 1, 0] = -1
    of_ranks = [torch.from_numpy(each) for each in ids]
    references = hierarchy.tables(config, of_ranks, [torch.ones(tokens, topk)] * ranks)
    layout = RelayTables(config)
    experts, servers = 16 // config.topology.num_servers, config.topology.num_servers
    for rank, reference in enumerate(references):
        words = torch.from_numpy(relay_tables(config, rank, ids))
        assert layout.of(words, "outer_ids").equal(reference.outer_ids)
        goes = reference.outer_ids >= 0
        assert layout.of(words, "outer_rows")[goes].equal(reference.outer_rows[goes])
        assert layout.of(words, "outer_counts").equal(reference.sent_to.int())
        own = config.topology.servers[rank]
        by_place = [(own + place) % servers for place in range(servers)]
        assert layout.of(words, "rail_counts").equal(reference.received_from[by_place].int())
        inner = layout.of(words, "inner_ids").view(servers, tokens, topk)
        active_index = layout.of(words, "inner_active_index").view(servers, tokens)
        for place, server in enumerate(by_place):
            relayed = reference.inner[server]
            number = len(relayed.tokens)
            assert active_index[place].tolist() == [0] * number + [-1] * (tokens - number)
            wanted = torch.where(relayed.inner_ids >= 0, relayed.inner_ids + place * experts, -1)
            assert inner[place, :number].equal(wanted)
            assert (inner[place, number:] == -1).all()
