"""The program `isobatch`: a thin dispatcher to the commands of the components."""
