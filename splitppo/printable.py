"""Text of others, made safe to print on a terminal."""


def printable(text: str) -> str:
    """Escapes all control characters of a text except line breaks, so that the text cannot move the cursor."""
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode() for char in text
    )
