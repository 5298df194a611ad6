"""The keys that the planner prints: pasted behind a configuration, they load, and place the run as the table says."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from controller.__main__ import main
from controller.commands.planner.measured import Measurement, read_measurement
from controller.commands.planner.place import keys_of, placed
from controller.commands.planner.plans import make_plans
from controller.commands.planner.report import advice
from splitppo.config import Config, load_config
from tests.support.groups import PROJECT
from tests.support.models import save_policy
from tests.unit.controller.commands.planner.test_plans import leave_run
from tests.unit.controller.commands.planner.test_shares import run as measured_with_share

pytestmark = pytest.mark.slow

ON_GPUS: dict[str, Any] = {"services__actor__devices": [4], "services__critic__devices": [5]}
BOUND: dict[str, Any] = {
    "services__actor": {"threads": 1, "cpus": [2]},
    "services__critic": {"threads": 1, "cpus": [3]},
}
GROUP: dict[str, Any] = {"services__rollout": {"threads": 1}}
GROUP_ON_GPU: dict[str, Any] = {"services__rollout": {"devices": [6]}}
IN_TURNS: dict[str, Any] = {"services__rollout": {"devices": [5]}, "rollout__share": 0.5}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_policy(tmp_path_factory.mktemp("policy")))


def pasted(output: str) -> dict[str, list[str]]:
    """The arguments of every line of advice, as a shell reads them, by what stands above it."""
    _, _, keys = output.replace("\\\n", "").partition("The keys, to paste behind ")
    _, *blocks = keys.split("# ")
    return {what: shlex.split(words) for what, _, words in (block.partition("\n") for block in blocks)}


def loaded(run_dir: Path, output: str) -> dict[str, Config]:
    return {what: load_config(run_dir / "config.yaml", words, is_stored=True) for what, words in pasted(output).items()}


@pytest.mark.parametrize("gpus", ["2", "4"])
@pytest.mark.parametrize("changes", [{}, BOUND, ON_GPUS])
def test_the_keys_of_the_colocated_layout_give_both_models_all_devices_in_turn(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], gpus: str
) -> None:
    run_dir = leave_run(tmp_path / "run", model, **changes)
    assert main(["plan", str(run_dir), "--gpus", gpus]) == 0
    config = loaded(run_dir, capsys.readouterr().out)["the fastest layout, colocated"]
    actor, critic = config.services.actor, config.services.critic
    assert (actor.devices, actor.cpus, actor.threads) == (critic.devices, critic.cpus, critic.threads)
    assert (config.run.schedule, config.placement.reference) == ("serial", "actor")
    assert len(actor.devices or actor.cpus) == (int(gpus) if changes else 0)
    assert actor.num_processes * int(actor.threads if not actor.devices else 1) == int(gpus)


@pytest.mark.parametrize(
    "changes", [{}, BOUND, ON_GPUS, GROUP, ON_GPUS | GROUP_ON_GPU, ON_GPUS | IN_TURNS | {"rollout__n": 4}]
)
def test_every_line_of_advice_loads_and_has_the_devices_of_its_layout(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str], changes: dict[str, Any]
) -> None:
    run_dir = leave_run(tmp_path / "run", model, **changes)
    for num_devices in ("3", "8"):
        assert main(["plan", str(run_dir), "--gpus", num_devices]) == 0
        output = capsys.readouterr().out
        assert max(map(len, output.partition("The keys")[2].splitlines())) <= 120
        configs = loaded(run_dir, output)
        assert len(configs) >= 1
        for what, config in configs.items():
            gpus = [device for group in config.groups.values() for device in group.devices]
            is_shared = "colocated" in what or "rollout__share" in changes
            assert is_shared or len(gpus) == len({*gpus}), what
            if gpus and not what.startswith("rollout.share"):
                assert len({*gpus}) == int(num_devices), what


def test_the_keys_of_the_best_share_make_a_rollout_group_on_the_critics_cores(tmp_path: Path, model: str) -> None:
    measured: Measurement = measured_with_share(tmp_path, model, 0.0)
    plans = make_plans([measured], None)
    assert [what for what in advice(plans) if what.startswith("rollout")] == ["rollout.share 0.5"]
    best = next(plan for plan in plans.shares if plan.share == 0.5)
    config = placed(measured.config, best)
    assert config.rollout_shares_devices
    assert (config.services.of("rollout").cpus, config.rollout.share) == ((1,), 0.5)
    assert keys_of(measured.config, best)["services.critic.cpus"] == [1]


def test_the_keys_of_the_page_are_those_of_the_planner(tmp_path: Path, model: str) -> None:
    text = (PROJECT / "docs/running.md").read_text(encoding="utf-8").partition("**Colocated placement**")[2]
    written = yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])
    measured = read_measurement(leave_run(tmp_path / "run", model, **ON_GPUS))
    colocated = make_plans([measured], 4).colocated
    assert colocated is not None
    tree: dict[str, Any] = {}
    for key, value in keys_of(measured.config, colocated).items():
        *sections, name = key.split(".")
        section = tree
        for step in sections:
            section = section.setdefault(step, {})
        section[name] = value
    assert written == tree


def test_json_has_the_same_keys(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = leave_run(tmp_path / "run", model, **ON_GPUS)
    assert main(["plan", str(run_dir)]) == 0
    printed = pasted(capsys.readouterr().out)
    assert main(["plan", str(run_dir), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["advice"] == printed


def test_colocated_models_need_the_memory_of_both_as_check_counts_it(tmp_path: Path, model: str) -> None:
    plans = make_plans([read_measurement(leave_run(tmp_path / "run", model, **ON_GPUS))], None)
    assert plans.colocated is not None
    assert plans.best_split is not None
    assert plans.best_split.reference == "actor"
    both = sum(gib for gib in plans.best_split.memory_gib.values() if gib is not None)
    assert plans.colocated.memory_gib["all"] == pytest.approx(both, rel=0.1)
