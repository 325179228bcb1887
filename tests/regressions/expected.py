"""What the first line of each failure has to say, by case."""

EXPECTED: dict[str, str] = {}
