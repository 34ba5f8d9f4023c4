"""What ``enlist demo`` runs: a PostgreSQL of its own and a small shop. Needs the extra ``enlist[demo]``."""
