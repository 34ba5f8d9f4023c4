"""Measurements that anybody can repeat: ``enlist bench``. Needs the extra ``enlist[demo]``."""
