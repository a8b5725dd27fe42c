"""Beginnings that the laboratory lets models go on from, written for this project.

Prose, code, numbers and several scripts; the last ones repeat themselves, so that lookup drafts.
"""

from __future__ import annotations

PROMPTS = (
    "The ferry left the harbour an hour late, and by the time it reached the island",
    "def mean(values):\n    total = 0\n    for value in values:\n        total +=",
    "Q: Why does ice float on water?\nA: Ice floats because",
    "one, two, three, four. one, two, three, four. one, two,",
    "My grandmother kept three kinds of apples in the cellar:",
    'for (size_t i = 0; i < n; i++) {\n    printf("%zu\\n",',
    "Am Anfang war die Stadt noch klein, aber",
    "red = 1\ngreen = 2\nblue = 3\n\nred = 1\ngreen = 2\nblue =",
    "The committee met on Tuesday to discuss whether the old bridge should",
    "SELECT city, AVG(price) FROM flats WHERE rooms > 2 GROUP BY",
    "Shopping list:\n- 2 lemons\n- 500 g flour\n- 1 bottle of",
    "The cat sat on the mat. The dog sat on the log. The cat sat on the",
    "In 1687 Newton published a book in which he showed that the planets",
    "Le petit train traverse la vallée chaque matin et",
    "| name | age |\n|------|-----|\n| Ana | 31 |\n| Bo |",
    "<li>north</li>\n<li>south</li>\n<li>north</li>\n<li>south</li>\n<li>",
    '"I never said that," he replied, folding the newspaper. "What I said was',
    "import os\nimport sys\n\n\ndef main() -> int:\n    path =",
    "Сегодня утром в городе было тихо, и",
    "alpha beta gamma delta; alpha beta gamma delta; alpha beta",
    "To change a bicycle tyre, first turn the bicycle over. Then",
    '{"city": "Lima", "country": "Peru"}\n{"city": "Oslo", "country":',
    "今日は天気がいいので、",
    "12 + 30 = 42\n7 + 8 = 15\n12 + 30 = 42\n7 + 8 =",
)
