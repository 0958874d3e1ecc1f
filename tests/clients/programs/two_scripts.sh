# Two trainings that know nothing of each other, started by one shell.
here=$(dirname "$0")
python "$here/plain.py" --seed 1 > first.txt &
python "$here/plain.py" --seed 2 > second.txt &
wait
cat first.txt second.txt
