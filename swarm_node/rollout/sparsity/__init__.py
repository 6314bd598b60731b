"""How many pages a sparse step reads, how well the tokens then hold, and the loop that corrects the one by the other."""
