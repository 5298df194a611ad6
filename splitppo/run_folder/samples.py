"""The few responses of a step that trackers show: the rows of rollouts/*/N.parquet that have a `shown` text.

Only who reads them needs pyarrow, which the Python of a tracker may lack.
"""

from pathlib import Path
from typing import Any

from splitppo.plain_file import open_plain
from splitppo.run_folder.columns import SHOWN

# The columns of a sample as trackers show it.
SAMPLE_COLUMNS = ("split", "data_source", "prompt", "response", "ground_truth", "score")
# The folders with the responses of a step, and of its validation; `shown_*` where responses are not recorded.
TRAINED = ("train", "shown_train")
VALIDATED = ("val", "val_only", "shown_val", "shown_val_only")
_READ = ("data_source", "prompt", SHOWN, "ground_truth", "score")


def folder_of_shown(kind: str) -> str:
    """Returns the folder for what trackers show of the responses of a kind ("train", "val") that are not recorded."""
    return f"shown_{kind}"


def rollouts_file(run_dir: Path, kind: str, step: int) -> Path:
    """Returns the path of the responses of a step in one of the folders."""
    return run_dir / "rollouts" / kind / f"{step}.parquet"


def read_samples(run_dir: Path, step: int) -> list[list[Any]]:
    """Reads the samples of a step, as rows of SAMPLE_COLUMNS; [] for a step without any.

    Raises:
        ImportError: this Python has no pyarrow.
        OSError, ValueError: a file cannot be read.
    """
    import pyarrow.parquet as pq

    samples: list[list[Any]] = []
    for kind in (*TRAINED, *VALIDATED):
        file = rollouts_file(run_dir, kind, step)
        if not file.exists():
            continue
        with open_plain(file) as stream, pq.ParquetFile(stream) as reader:
            if SHOWN not in reader.schema_arrow.names:  # of a version that wrote samples.jsonl
                continue
            rows = reader.read(columns=list(_READ)).to_pylist()
        split = TRAINED[0] if kind in TRAINED else VALIDATED[0]
        samples += [[split, *_texts_and_score(row)] for row in rows if row[SHOWN] is not None]
    return samples


def _texts_and_score(row: dict[str, Any]) -> list[Any]:
    score = float(f"{row['score']:.7g}")  # the digits that 32 bits hold
    return [row["data_source"], row["prompt"], row[SHOWN], row["ground_truth"], score]
