"""How do numbers and tables look to a reader, and how is a file written? ``table`` formats units
and tables, ``files`` writes JSON files.
"""
