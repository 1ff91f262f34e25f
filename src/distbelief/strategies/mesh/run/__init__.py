"""A member at work: its part of the model, a step, and what members send each other during a step."""
