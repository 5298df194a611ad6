"""The length at which a model changes its rotary factors, in the forms that a config.json may have."""

from __future__ import annotations

from typing import Any

import pytest

from splitppo.config.rope import rope_switch


@pytest.mark.parametrize(
    ("described", "switch"),
    [
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 4096}}, 4096),
        ({"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 4096}, 4096),
        ({"rope_scaling": {"rope_type": "longrope"}, "max_position_embeddings": 8192}, 8192),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 16},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                }
            },
            16,
        ),
        ({"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 4096}}, None),
        ({"rope_scaling": None, "rope_parameters": None, "max_position_embeddings": 8192}, None),
        ({}, None),
    ],
)
def test_only_longrope_has_a_switch(described: dict[str, Any], switch: int | None) -> None:
    assert rope_switch(described) == switch
