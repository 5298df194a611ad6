"""Agents, which call a chat API: functions and programs, started for each conversation, and ended with it.

    agents.py      a conversation with an agent: its endpoint, what it asks, how it ends, its rewards
    program.py     a process with all that it starts: what it is given, what it prints, its end
    errors.py      why it failed, from what it printed
    variables.py   the environment variables of a program
    places.py      how many programs live at a time

All of them run in an environment process.
"""
