"""Pages as files of a directory that processes share: for every backend that keeps pages in files.

::

    pages.py         what such a backend opens
    tree.py          from a key to a file      pagefile.py  one file, opened and marked as used
    staging.py       pages in the making       writer.py    room, bytes, name
    usage.py         what pages take           evict.py     which of them go
    housekeeper.py   the thread that sees to it
    verify.py        a page checked by its header; commands.py  verify, du, gc, clear
"""
