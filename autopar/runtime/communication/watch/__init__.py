"""How do ranks notice that one of them is lost?

``watchdog`` (this rank's thread, and the sections in which it may wait), ``verdict`` (which rank is
to blame), ``rank_board`` (what ranks write for each other), ``abort`` (how a wait ends).
"""
