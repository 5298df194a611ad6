"""Groups over several machines: the combinations of keys that are allowed."""

from pathlib import Path

import pytest

from tests.support.configs import load, mistake

EXTERNAL = ("services.launch=external",)
TWO = (*EXTERNAL, "services.actor.nnodes=2", "services.actor.num_processes=4", "services.actor.master_addr=one")


def test_ranks_and_gpus_are_divided_between_machines(tmp_path: Path) -> None:
    service = load(tmp_path, *TWO, "services.actor.devices=[0,1]").services.actor
    assert (service.num_local_processes, service.master_port) == (2, 29500)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["services.actor.num_processes=3"], "num_processes (3) must be a multiple of nnodes (2)"),
        (["services.actor.devices=[0,1,2,3]"], "devices lists 4 GPUs for num_processes 4 on 2 machines"),
        (["services.launch=local"], "services.launch is local, which starts groups on this machine alone"),
        (["services.actor.master_addr=''"], "services.actor.master_addr: expected the name of machine 0 of the group"),
        (["services.actor.master_addr=127.0.0.1"], "services.actor.master_addr is '127.0.0.1', which means another"),
        (
            ["services.critic.nnodes=2", "services.critic.num_processes=2", "services.critic.master_addr=one"],
            "services.actor.master_addr and master_port are both one:29500: give each a port of its own",
        ),
    ],
)
def test_what_does_not_fit_is_one_sentence(tmp_path: Path, overrides: list[str], sentence: str) -> None:
    assert sentence in mistake(tmp_path, *TWO, *overrides)


def test_two_groups_at_one_address_are_refused(tmp_path: Path) -> None:
    addresses = [f"services.{role}.address=127.0.0.1:7001" for role in ("actor", "critic")]
    said = mistake(tmp_path, *EXTERNAL, *addresses)
    assert "services.critic.address and services.actor.address are both 127.0.0.1:7001: give each a port" in said
