"""dspy: a signature that a model fills in."""

import dspy
from weather import BASE_URL, MODEL, QUESTION

dspy.configure(lm=dspy.LM(f"openai/{MODEL}", api_base=BASE_URL, api_key="none", cache=False))
print(dspy.Predict("question -> answer")(question=QUESTION).answer)
