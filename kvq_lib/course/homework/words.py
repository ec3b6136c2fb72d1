"""Words for what commands print."""


def count(number: int, noun: str) -> str:
    """A number and a noun: "1 student", "2 students"."""
    return f"{number} {noun}" + ("" if number == 1 else "s")
