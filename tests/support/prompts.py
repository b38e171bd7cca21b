"""Twenty prompts of varied kinds for the comparisons with a reference."""

FRANCE = "The capital of France is"
STACK = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
HAIKU = "<|im_start|>user\nWrite a haiku about the sea.<|im_end|>\n<|im_start|>assistant\n"
WEATHER = "今天天气很好，我们去"
FAMILY = "👨‍👩‍👧‍👦 is an emoji that shows"
FOX = "The quick brown fox jumps over the lazy dog. " * 32
"""About 320 tokens."""
LONG = "The history of the lighthouse is a history of light itself. " * 90
"""About 1,080 tokens: three of the usual chunks."""

PROMPTS = [
    FRANCE,
    "def fibonacci(n):\n    ",
    STACK,
    "SELECT name, COUNT(*) FROM orders WHERE",
    "#include <stdio.h>\nint main(void) {\n",
    "<|im_start|>user\nWhat is the boiling point of water?<|im_end|>\n<|im_start|>assistant\n",
    HAIKU,
    "<|im_start|>system\nBe terse.<|im_end|>\n<|im_start|>user\nName three fruits.<|im_end|>\n<|im_start|>assistant\n",
    WEATHER,
    "日本の首都は",
    "한국의 수도는",
    "🎉🎂🎈 Happy birthday! 🥳",
    FAMILY,
    "Les misérables est un roman de",
    "Die Quantenmechanik beschreibt",
    "1, 2, 4, 8, 16, 32,",
    FOX,
    "Dear Sir or Madam,\n\nI am writing to",
    "e\u0301te\u0301 and nai\u0308ve are words with combining marks:",
    LONG,
]
