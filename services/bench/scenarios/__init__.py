"""Claims of this project, each measured against its baseline in the same run.

    scenario file ─► servers of both sides ─► pdray bench, side by side, in turn ─► findings ─► JSON line ─► docs page

A file (`*.yaml` here) holds the claim, the settings of both sides, the loads, and in which direction each figure should
move. A claim that is not borne out is reported as such. Not here: other projects' servers; `pdray bench` itself takes
any URL.
"""
