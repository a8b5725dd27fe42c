"""Twenty-four prompts for the identity tests, written for this project."""

from __future__ import annotations

PROMPTS = [
    # prose
    "The lighthouse keeper climbed the stairs one last time and",
    "It is often said that bread tastes best on the second day, because",
    "Dear Ms Okafor,\n\nThank you for your letter of the third of May. We",
    "In the winter of 1911 the expedition ran out of paraffin, and",
    '"You never told me," she said, "that the river was',
    "The three laws of thermodynamics can be stated as follows:",
    # code
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n",
    "SELECT name, COUNT(*) FROM orders\nJOIN customers ON",
    '{"id": 1, "name": "Ada", "tags": ["a", "b"]}\n{"id": 2, "name":',
    "<ul>\n  <li>first</li>\n  <li>second</li>\n",
    "x != y && (a || b) ? f(x) : g(y);  // check",
    # other scripts
    "Москва является столицей",
    "东京是日本的首都，人口",
    "القاهرة هي عاصمة",
    "กรุงเทพมหานครเป็นเมืองหลวงของ",
    "हिन्दी भारत की एक प्रमुख भाषा है और",
    # emoji, numbers, white space, odd ends
    "Weather today: ☀️🌦️⛈️❄️ Mood: 😀😃😄😁 Flags: 🇫🇷🇯🇵🇧🇷",
    "👩‍👩‍👧‍👦 The family went to the 🏖️ and",
    "3.14159265358979 2.71828182845904 1.41421356237309 1.61803398874989",
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89,",
    "name        age     city\nAnna        34      Oslo\nBen         7       Rome\n",
    "line one\n\n\n\n        deep indent\t\ttabs\n                              far right\n",
    "A",
]
