"""Makes a Hugging Face folder from a checkpoint: python -m services.engine.export --checkpoint DIR --output DIR.

Adapters are merged into their base; with --adapter the folder gets only them, in peft's format.

Runs in one process, whatever number of ranks wrote the checkpoint.
"""

import argparse
import shutil
import sys
from pathlib import Path

from services.engine import hf_folder
from services.engine.checkpoint import HF_FOLDER, write_hf_weights
from services.engine.model.adapter_checkpoint import copy_adapter
from services.engine.shards import read_entries
from splitppo.config_error import sentence_of
from splitppo.manifest import MANIFEST, read_manifest, verify_files


def export(checkpoint: Path, output: Path, *, adapter: bool = False) -> None:
    """Writes config, tokenizer and fp32 weights of one role's checkpoint (e.g. global_step_10/actor) to a new folder.

    With `adapter` it copies the adapter alone.

    Raises:
        ValueError: the checkpoint is not complete, or damaged, or has no adapter, or the output folder is not empty.
        OSError: storage has failed.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} exists and is not an empty folder")
    if (checkpoint / MANIFEST).exists():  # a folder that was written by the engine alone has none
        verify_files(checkpoint, read_manifest(checkpoint))
    if (checkpoint / "actor").is_dir():
        raise ValueError(f"{checkpoint} is a pair: expected the folder of one role, such as {checkpoint / 'actor'}")
    if (checkpoint / "config.json").is_file():
        raise ValueError(f"{checkpoint} is a Hugging Face folder already: expected a checkpoint, global_step_N/actor")
    read_entries(checkpoint)  # refuses what is not complete before anything is written
    try:
        if adapter:
            copy_adapter(checkpoint, output)
        else:
            hf_folder.copy_files(checkpoint / HF_FOLDER, output, ("config.json", *hf_folder.COPIED_FILES))
            write_hf_weights(checkpoint, output)
    except BaseException:
        shutil.rmtree(output, ignore_errors=True)  # it was empty
        raise


def main(arguments: list[str] | None = None) -> int:
    """Parses the command line and exports a checkpoint; returns the exit status, 2 for a mistake of the caller."""
    parser = argparse.ArgumentParser(prog="services.engine.export", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True, help="e.g. runs/x/checkpoints/global_step_10/actor")
    parser.add_argument("--output", type=Path, required=True, help="new folder")
    parser.add_argument("--adapter", action="store_true", help="copy the adapter instead of merging it")
    options = parser.parse_args(arguments)
    try:
        export(options.checkpoint, options.output, adapter=options.adapter)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {sentence_of(error)}\n")
        return 2
    sys.stdout.write(f"{options.output}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
