"""Images in prompts: their headers, sizes in patches, pixels, tokens and positions, as Qwen's vision models have them.

The controller reads headers and counts tokens; a rank of a worker makes pixels. Both use this package, so that they
cannot differ. It needs numpy and Pillow, and neither torch nor transformers.
"""
