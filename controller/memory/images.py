"""The memory of a rank for the images of its prompts, in bytes: pixels, the vision tower's activations, decoded images.

Legend beside that of `passes`: a micro-batch has Q patches of F values; a tower has B blocks, U hidden, W width of its
MLP, and passes the features of R layers on; a token of the language model has S patches. Every token of a prompt may be
one of an image, so Q is at most S times the prompt tokens of the micro-batch.
"""

from controller.memory.group import Group
from controller.models.shape import TowerShape
from splitppo.config.sections.models import Checkpointing
from splitppo.machine.memory_limits import DECODED_IMAGES_BYTES

_STEPS_HELD = 2  # in slots; of the step that is trained and the next one


def pixel_bytes(tower: TowerShape, patches: int) -> int:
    """Returns the bytes of the pixels of patches, in fp32: 4 Q F."""
    return 4 * patches * tower.patch_dim


def patch_bytes(tower: TowerShape, patches: int, hidden: int, bytes_each: int) -> int:
    """Returns the bytes of what images have beside a forward pass of the language model: pixels, and their features.

    4 Q F + c Q / S R D
    """
    return pixel_bytes(tower, patches) + bytes_each * patches // tower.merged * tower.num_mergers * hidden


def tower_transients(tower: TowerShape, patches: int, bytes_each: int) -> int:
    """Returns the bytes of what the tower computes, and keeps for no other block: its input, and the MLP of a block.

    c Q (F + 2 U + 3 W)       2 W instead of 3 W if the MLP has no gate; in fp32 the pixels are the input themselves
    """
    as_input = tower.patch_dim if bytes_each < 4 else 0
    return bytes_each * patches * (as_input + 2 * tower.hidden + (3 if tower.is_gated else 2) * tower.intermediate)


def saved_by_tower(tower: TowerShape, patches: int, bytes_each: int, *, checkpointing: Checkpointing) -> int:
    """Returns the bytes of activations that a tower keeps for its backward pass: none if it is frozen.

        block:  Q (8 U + c (8 U + 4 W))     with a gated MLP, whose norms keep their input in fp32
                Q c (8 U + 2 W)             with another one
        all:    B x block + c Q (3 R + 1) U of what merges patches and of the first block's input, and in bf16 c Q F

    With gradient checkpointing B c Q U and one block in place of B blocks, selective 2 B c Q U.
    """
    if not tower.learns:
        return 0
    narrow = 8 * tower.hidden + (4 if tower.is_gated else 2) * tower.intermediate
    block = patches * (bytes_each * narrow + (8 * tower.hidden if tower.is_gated else 0))
    width = tower.hidden * (2 if checkpointing == "selective" else 1)
    blocks = tower.num_layers * (bytes_each * patches * width if checkpointing else block)
    merging = bytes_each * patches * (3 * tower.num_mergers + 1) * tower.hidden
    as_input = bytes_each * patches * tower.patch_dim if bytes_each < 4 else 0
    return blocks + (block if checkpointing else 0) + merging + as_input


def kept_images(group: Group) -> int:
    """Returns the bytes of main memory that images take on rank 0, in all phases; other ranks have no slots.

    These are decoded images, up to DECODED_IMAGES_BYTES, and the files of the images of two steps in the slots, as far
    as their size is known.
    """
    if group.model.tower is None:
        return 0
    prompts = group.config.data.train_batch_size
    in_slots = _STEPS_HELD * prompts * (group.image_bytes or 0)
    return DECODED_IMAGES_BYTES + in_slots
