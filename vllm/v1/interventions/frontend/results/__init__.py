# SPDX-License-Identifier: Apache-2.0
"""Results out: captured rows as they come, gathered for the outputs of their requests.

outputs.py    adds captures to outputs, and holds outputs until these are there
hold.py       keeps last outputs until the captures that end in them are complete
judges.py     scores of rows by rules, and where these fire
watch.py      decides the rules of a completion as its rows and tokens come
webhook.py    tells a second stage of rules that fired
inbox.py      rows as they come from the engine core, for each request to read
collector.py  gathers the rows of one completion for `inline`
gathered.py   rows as results have them, made when they are read
pieces.py     places of rows in memory, and the code that joins them when read
memory.py     memory that rows are copied to
link.py       the frontend's calls to the captures of the engine core
progress.py   the progress bar of an offline run
"""
