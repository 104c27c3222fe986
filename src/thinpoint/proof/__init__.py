"""What `thinpoint bench` measures on the user's machine: rates, and three proofs: step time, restore, resume.

measure: scale -> trainer -> steps, restores, resume, rates -> record (JSON)
show:    record -> tables (terminal, Markdown, HTML) and plots (SVG, PNG); needs no torch
"""
