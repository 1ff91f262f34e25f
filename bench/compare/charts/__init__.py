"""The results as figures. Ours stands out in colour, everybody else is grey, spread is shown, losses stay in."""
