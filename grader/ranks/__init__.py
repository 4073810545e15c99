"""The way to the ranks and back: starts them, shuts them in, keeps the clock, carries plain data.

`grader.judging` imports the launcher and the forms in which data travel. The fork server and the supervisor
import `grader.beside`, which they start; nothing of this room imports `grader.judging`.
"""
