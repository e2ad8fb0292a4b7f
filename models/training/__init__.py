"""The synthetic worlds that the sample models are trained on, and how they are trained."""
