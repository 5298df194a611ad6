"""Parsers of the ways in which models write calls of tools: text -> (text before the calls, calls).

What a model meant as a call but did not write as one is a call with an error. Nothing that a model wrote is evaluated.
"""
