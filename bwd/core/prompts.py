"""The fixed prompts of the correctness check: plain continuations, so that they need no chat template and
suit a small model as well as a large one. Prose, lists, sums, code, other alphabets: kernels that are
wrong for one kind of input are often right for another."""

from __future__ import annotations

from typing import Final

PROMPTS: Final = (
    "The capital of France is",
    "Question: What is the capital of France?\nAnswer:",
    "Water boils at a temperature of",
    "Once upon a time, in a village by the sea, there lived a fisherman who",
    "The three states of matter are solid, liquid and",
    "A short letter to a friend about the weather:\n\nDear Anna,\n",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13,",
    "12 + 30 = 42\n15 + 20 = 35\n27 + 41 =",
    "Monday, Tuesday, Wednesday, Thursday,",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n",
    "SELECT name, age FROM people WHERE",
    '{"name": "Ada", "born": 1815, "languages": ["English", "French"],',
    "Les mois de l'année sont janvier, février, mars,",
    "Die Hauptstadt von Deutschland ist",
    "El agua es importante para la vida porque",
    "一年有四个季节：春、夏、",
    "Recipe for pancakes.\nIngredients:\n- flour\n- milk\n- eggs\n\nSteps:\n1.",
    "A train leaves at 9:15 and arrives at 11:45. The journey takes",
    "Explain in simple words why the sky is blue.\n\nThe sky is blue because",
)
"""Twenty of them."""
