# SPDX-License-Identifier: Apache-2.0
"""Transport of captured rows to consumers.

selected.py      which rows of a completion a selection means, and whether they came
feed.py          from a completion's rows, as they come, to what one consumer gets
host.py          runs one consumer in threads of its own
hosted.py        the consumers of one process, and the feeds of a completion
completion.py    what a host does to one completion: the calls of its session
landing.py       memory in which rows land once, and all processes of the host read them
"""
