"""Child processes: started, forked, waited for, ended, and why they ended.

    ending.py      waits for a child, ends it with all it has started, and says how it ended
    forks.py       a process from which others are forked
    start.py       the command line of a child that runs Python
    parent.py      makes a child end with its parent; the child calls it
    supervisor.py  runs a program, and ends all that the program has started
    title.py       the name of a forked child in `ps`
    tree.py        finds and kills a process and its descendants

All but tree.py import the standard library only, and quickly: any process can use them first.
"""
